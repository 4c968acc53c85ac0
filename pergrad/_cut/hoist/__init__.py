"""TODO _cut.hoist."""
