"""Measuring the engines of a sweep on several GPUs or machines at once.

work.py       a plan -> units: engines with all their points, and the baseline that they are compared with; the
              supervisor of a worker, which hands its points on; what of this host each worker gets
worker.py     one unit in a process of its own, which writes each point to a spool folder
driver.py     gives units to a launcher (this host, a Ray cluster, Slurm), writes the record alone, tries what a dead
              worker left
"""
