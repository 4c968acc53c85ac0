"""The benchmark: what a user would pick instead, side by side with pergrad.

models    what is differentiated        cases     the list of them, and how they grow
peak      memory of a whole process     run       everything measured, into one JSON file
tables    the numbers as tables         drawings  and as figures
"""
