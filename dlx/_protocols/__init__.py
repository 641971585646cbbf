"""Protocols between libraries: an object in, a `dlx.Tensor` out. No adapter is needed for any of them."""
