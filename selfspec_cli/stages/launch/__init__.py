"""Measuring the engines of a sweep on several GPUs or machines at once.

units.py      a plan -> units: engines with all their points, and the baseline that they are compared with; the
              supervisor of a unit, which starts its worker, hands its points on and says how it ended
worker.py     one unit in a process of its own, which writes each point to a spool folder
devices.py    the GPUs and processor cores that this host's workers share
joblib.py, ray.py, submitit.py   where supervisors run: this host, a Ray cluster, Slurm. Each has `workers`, how many
              units it can measure at once, and `launch`, which measures units: (unit, a point as JSON or an `Ended`)
driver.py     gives units to a launcher, writes the record alone, tries what a dead worker left
"""
