"""What was found, as a page with figures.

sheet       how a figure looks, and how it is drawn into files
figures     the kinds of figures
report      a page in one HTML file
panels      a table of such a page as a figure
findings    a sweep as such a page
gather      any runs, finished or not, as such a page
"""
