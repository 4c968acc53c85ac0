"""A page in the browser that follows runs while they go on.

follow      what is new in the directories of runs, since someone looked last
server      the page and its news, on the loopback address
static/     the page itself: watch.html, watch.css, watch.js
"""
