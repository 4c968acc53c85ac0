"""What is measured outside of the package: PyTorch beside it, and estimators of mu^2."""
