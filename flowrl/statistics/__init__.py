"""Every interval and test of the project: bootstrap, crossed designs, pairs, kernel distance, reliability."""
