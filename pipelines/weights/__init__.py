"""Where and how weights of a denoiser lie: over processes, in memory, in which numbers."""
