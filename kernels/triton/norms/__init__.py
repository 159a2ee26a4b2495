"""Kernels of the passes that norms on shards consist of.

`statistics` reduces images to moments and sums, `elementwise` makes images of images.
Letters: a sample n of N, a channel c of C, and a pixel p of all pixels of an image.
Each program takes BLOCK_C channels by BLOCK_P pixels of one sample. Parameters that
several kernels have:

    blocks      blocks of pixels of a sample
    channels    C
    pixels      pixels of an image
    columns     pixels of a row
    x_strides   strides of x from sample to sample, from channel to channel, from row to
                row and from column to column, in elements; likewise of other images
    HAS_ROWS    whether an image has several rows, else all its pixels have one stride
    INT64       whether addresses take 64 bits
    mean_stride stride of statistics from sample to sample: 0 where all samples share
                them; likewise of scale and shift
"""
