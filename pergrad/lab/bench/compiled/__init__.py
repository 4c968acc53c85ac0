"""What a program that XLA has compiled for a chip costs there, without the chip.

hlo      the text of a compiled program, as computations and instructions
loops    how often a loop of it runs
traffic  the bytes that an instruction reads and writes in the chip's memory
products the operations of the matrix products and convolutions in an instruction
chip     what is asked of a chip: the work of one instruction
tpu      the work of an instruction on a TPU, for which the compiler has an estimate
gpu      the work of an instruction on a GPU, by a roofline
chips    the numbers of the chips, and where they come from
meter    the time of all instructions, each as often as it runs
"""
