"""`flowrl reward realism`: the distance of a run's images to drawn scenes."""
