"""Faults that are planted in a small cluster.

cluster.py   the node, its pods, steersman on it, and connections that tell whether it works
plants.py    ways to plant something: commands, rules of nft, objects, programs of BPF
table.py     the faults: the plant, which connection breaks, and the words that doctor has to say
judge.py     what has to be true of each
odd.py       what looks wrong and breaks nothing
"""
