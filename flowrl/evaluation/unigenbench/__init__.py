"""UniGenBench: test points of images, asked of a judge."""
