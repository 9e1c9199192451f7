"""`flowrl reward score`: values of rewards for a folder of images."""
