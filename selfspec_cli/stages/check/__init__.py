"""Performance checks (`selfspec check`): is the speed still what a file of experiments/checks/ asks for?

file.py       reads such a file: arms, workloads, limits
run.py        measures its arms and baselines, again where the intervals leave it open
verdict.py    compares points with limits; keeps the verdicts of a results folder in checks.jsonl
"""
