"""The lab: trains language models with pergrad's optimizers and turns the runs into findings.

The lab needs the extra `pergrad[lab]`. It is an application: it uses what `pergrad` exports, and nothing
else in `pergrad` imports it. A folder of the lab imports only from what stands above it in this list:

    errors, files      an error in one line, and how files are written
    config             what is asked for
    timing             functions of the same arguments, timed side by side
    run/               one training run: data, model, optimizer, and the run's own directory
    compare/           many runs, fairly tuned, and what a difference between them says
    pages/             a page with figures: about a sweep, a study, or any runs that are there
    watch/             a page that follows runs while they go on
    bench/             what statistics cost, on many models and in every way there is
    studies/           the questions of the paper, one module each
    progress, picture, plans    what is seen in the terminal
    cli_bench, cli     the command `pergrad`

One folder takes whole modules from another (`from pergrad.lab.run import records`), so that a module is
loaded only where it is needed: `pergrad --help` loads no model, and a process whose memory is measured
draws no figures.
"""
