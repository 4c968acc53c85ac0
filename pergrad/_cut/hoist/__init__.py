"""Between trace and cut: sums over positions leave loops and branches.

`hoist` walks through the program, `loops` and `branches` do one loop or one conditional each, and
`leaving` says which tails leave at all.
"""
