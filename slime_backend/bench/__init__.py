"""`reef-slime bench NAME` measures ours against what others do; catalog.py lists the benches."""
