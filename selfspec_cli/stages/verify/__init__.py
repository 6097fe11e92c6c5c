"""`selfspec verify`: is the output of an arm the model's own? Shown on the user's model and device.

cases.py         the greedy requests, and what happens to the engine meanwhile
greedy.py        runs them, and judges each first difference by what the plain engine says of it
sampling.py      sampled requests of the arm and of the plain engine, twice
distribution.py  are two samples from one distribution, and is a sample from this one: tests and their power (pure)
verdict.py       the document, its verdict, and the name of the fault that the evidence points to (pure)
run.py           the engines, one after the other: the arm, the plain one, and where needed one that says how the plain
                 engine decides when tokens come together
"""
