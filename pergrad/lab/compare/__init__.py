"""Many runs, fairly compared.

sweep     many runs, each method tuned in the same way
decide    what a difference between runs says about a claim
"""
