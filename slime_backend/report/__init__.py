"""`report.html`: one run to look at, in one file that needs no network. Entry: `write.write_report`."""
