"""Where rollout records lie: the writer, its files, Parquet, the index and the reader."""
