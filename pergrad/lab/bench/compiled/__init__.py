"""What a program that XLA has compiled for a chip costs there, without the chip.

hlo      the text of a compiled program, as computations and instructions
loops    how often a loop of it runs
traffic  the bytes that an instruction reads and writes in the chip's memory
chips    the numbers of the chips, and where they come from
meter    the time of all instructions, each as often as it runs
"""
