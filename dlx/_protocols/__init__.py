"""The protocols between libraries: DLPack, buffers, array interfaces, Arrow, memory at an address.

An object goes in, a `dlx.Tensor` comes out. No adapter is called here.
"""
