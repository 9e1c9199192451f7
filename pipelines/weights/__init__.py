"""Where and in what form the weights of a denoiser lie."""
