"""Makes tables from what the passes of `autotune explain` wrote: where the time of a step goes, and where the memory goes.

The tuner's side: no torch. A table that cannot be made is absent with a reason, never zero.
"""
