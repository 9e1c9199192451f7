"""Stock pipelines that no family is written for, called as they are."""
