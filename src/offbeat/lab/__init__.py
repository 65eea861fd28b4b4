"""Runs that produce records, and the small data set that they train on.

digits.py    1,797 handwritten digits that ship with offbeat
simulate.py  a user's own script on every worker of a virtual cluster
stand_ins.py what a script written for torchrun finds there
profile.py   this job's workers and network as a cluster file
fit.py       from measured times to what a cluster file can express
"""
