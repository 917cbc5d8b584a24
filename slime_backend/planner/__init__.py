"""The planner predicts what each mode costs a given traffic, and recommends one: docs/planner.md has the formulas.

traffic.py     the load of one engine, and how often weights are published
speeds.py      how fast the engine is
work.py        what each mode prefills: for a request, and again at each publication
predict.py     throughput, prefilled tokens and lag of each mode
recommend.py   the best mode, and where another one becomes better
at_start.py    `--disjoint-prefix-sharing=auto`
from_ledger.py, from_bench.py   traffic and speeds of a recorded run, of a measurement
page.py        the plots
"""
