"""`selfspec verify`: is the output of an arm the model's own? Shown on the user's model and device.

greedy.py     greedy requests, and what the plain engine says of each first difference
sampling.py   sampled requests, and whether two samples are from one distribution
verdict.py    the document, its verdict, and the name of the fault that the evidence points to (pure)
engines.py    what the arm's engine does in a run, and the plain one
run.py        the engines, one after the other: the arm, the plain one, and where needed one that says how the plain
              engine decides when tokens come together
"""
