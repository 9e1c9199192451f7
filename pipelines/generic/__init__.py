"""Stock pipelines without a family, called as they are."""
