"""Shadow images: a warmed-up worker, checkpointed once by CRIU and restored instead of started.

    key        what makes two engines able to use the same image
    store      the folder of images: published whole, checked, evicted
    template   the process that is made into an image: a warmed-up worker without weights, sockets or secrets
    thin       turns the copied memory of an image into mapped memory
    builder    makes one image: template, dump, thin, canary, publish
    canary     the tokens that a process from an image must repeat
    restore    a worker from an image, as a child of this process
    depot      what an engine uses: is there an image, start a worker from it, have one built

Nothing here is needed for an engine to work: whatever goes wrong, workers are started through the nursery, and an event
says why. See docs/decisions/0005-shadow-images.md.
"""
