"""A folder of wheels for a GPU machine without network access, within the limit on its size.

`fetch` downloads the pinned wheels, `strip` drops what no check imports (`rules` says what and
why), `standin_wheel` packs the stand-in for SGLang's compiled kernels, `manifest` adds it up.
"""
