"""What a network's weights are while they are trained: in which form, on which device, which of them change."""
