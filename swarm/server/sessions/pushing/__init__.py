"""How outputs go on from one session to the next, and which of the steps that wait there are computed as one."""
