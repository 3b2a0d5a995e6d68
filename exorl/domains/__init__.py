"""What each domain's states mean: observations and rewards as closed forms over arrays.

One file a domain, in the manner of `dm_control.suite`, whose names the accessors keep. They read
simulator states `physics [..., P]` with any leading dimensions, in float64.
"""
