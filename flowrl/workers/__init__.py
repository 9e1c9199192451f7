"""Workers on Ray that draw images for the process that learns."""
