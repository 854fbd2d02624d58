"""What upstream's kube-proxy did, by packets, and whether steersman would do the same.

The records are measurements (tests/data/upstream, with a README in each folder).
"""
