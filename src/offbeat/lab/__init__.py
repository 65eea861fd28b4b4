"""Runs that produce records, and what they train.

race.py         algorithms against each other, on one cluster and one task
contestants.py  who takes part: algorithms by name, with settings
goals.py        what a run is to reach, and when it ends
train.py        one worker of one run, in whichever world it is
processes.py    the real workers of a race
progress.py     what a person sees meanwhile
verdict.py      the table at the end, and the sentence
outputs.py      files that are whole or not there
tasks/          what can be trained, one small file each
simulate.py     a user's own script on every worker of a virtual cluster
digits.py       1,797 handwritten digits that ship with offbeat
"""
