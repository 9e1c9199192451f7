"""Image and video files, contact sheets, kept samples, perturbations."""
