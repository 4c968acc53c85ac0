"""One training run. Reading order is running order:

data          text and images without a download
model         the transformer and the convolutional network that are trained
optimizers    the optimizer that a configuration asks for
peers         the other processes of a run: whether they are still there
devices       where arrays lie, on several devices and in several processes
checkpoints   the state of a run on disk, with checksums
records       a run's directory: what was asked, what came out, and where to go on
train         the run itself
events        the metrics of a run for TensorBoard
"""
