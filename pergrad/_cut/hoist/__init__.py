"""Between stages 1 and 2, sums over positions leave loops and branches.

`hoist` walks through the program, `loops` has what happens to one loop, `branches` what happens to one
conditional, and `leaving` says which tails leave at all.
"""
