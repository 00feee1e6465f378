"""Token dispatch and combine: how tokens reach the experts' ranks and how partial outputs come back.

`cost` needs no torch: the planner prices dispatchers with it.
"""
