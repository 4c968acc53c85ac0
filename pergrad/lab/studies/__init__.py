"""Studies: each module has one question of the paper, as a `STUDY` that `pergrad study NAME` runs."""
