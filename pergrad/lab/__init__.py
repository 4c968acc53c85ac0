"""The lab: trains language models with pergrad's optimizers and turns the runs into findings.

Needs the extra `pergrad[lab]`; nothing else in pergrad imports it. Reading order is running order:

    config    what is asked for            data      text and images without a download
    model     what is trained              train     one run, in a directory of its own (runs)
    sweep     many runs, fairly tuned      decide    what a difference between runs says
    report    a page with figures          findings  a sweep as such a page
    gather    any runs as such a page      progress  what is seen in the terminal meanwhile
    timing    programs side by side        tasks     the same statistics in every way there is
    price     what they cost               bench     on many models, as tables and figures
    studies   a module for every question  cli       the command `pergrad`
"""
