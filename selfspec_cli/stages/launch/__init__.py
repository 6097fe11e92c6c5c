"""Measuring the engines of a sweep on several GPUs or machines at once.

units.py      a plan -> units: engines with all their points, and the baseline that they are compared with
worker.py     one unit in a process of its own, which writes each point to a spool folder
supervise.py  starts that process, hands its points on as they come, and says how it ended
devices.py    the GPUs and processor cores that this host's workers share
joblib.py, ray.py, submitit.py   where supervisors run: this host, a Ray cluster, Slurm
driver.py     gives units to a launcher, writes the record alone, tries what a dead worker left
"""
