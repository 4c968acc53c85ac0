"""One training run. Reading order is running order:

data          text and digits without a download
images        two photographs, cut into pieces
model         the transformer, the LSTM and the convolutional networks that are trained
optimizers    the optimizer that a configuration asks for
peers         the other processes of a run: whether they are still there
devices       where arrays lie, on several devices and in several processes
checkpoints   the state of a run on disk, with checksums
records       a run's directory: what was asked, what came out, and where to go on
found         runs as others find them on disk: where they are, and how they are told apart
outliers      which examples of a batch have an unusually large gradient
train         the run itself
events        the metrics of a run for TensorBoard
"""
