"""The planner: memory, communication and time of every layout that works, from sizes alone. No torch.

Each file answers one question: `model` what is to be split, `configs` and `families` where that is read from,
`hardware` what it is split over, `memory` and `timing` what a layout costs, `ranking` which layouts there are, and
`advice` why the first of them is first.
"""
