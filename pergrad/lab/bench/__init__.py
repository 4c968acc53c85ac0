"""The benchmark: what a user would pick instead, side by side with pergrad.

tasks      the same statistics, asked for in every way there is
price      what they cost, measured
models     what is differentiated; `image_models` has those of images
cases      the list of models, and how they grow
peak       the memory of a whole process
run        everything measured, into one JSON file
tables     the numbers as tables
drawings   the numbers as figures
rates      the rates that the plan prices strategies with, on this machine
target     candidates compiled for a chip that need not be there
compilers  XLA's compilers for chips, which work without the chip
compiled   the time, memory and traffic of a compiled program on a chip
operations the operations of a traced program

Four modules are commands, `python -m pergrad.lab.bench.NAME`: `docs` writes the numbers into the pages
of the documentation; `torch_side_by_side` measures PyTorch's libraries on the models of `torch_models`,
in an environment of its own; `mean_square` compares estimators of the squared mean gradient; and
`sharded` compiles statistics of sharded parameters for many TPU chips.
"""
