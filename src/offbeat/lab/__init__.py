"""Runs that produce records, and the small data set that they train on.

digits.py    1,797 handwritten digits that ship with offbeat
simulate.py  a user's own script on every worker of a virtual cluster
"""
