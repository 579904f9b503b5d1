"""OCI images: artifacts as registries and container runtimes know them (image-spec and distribution-spec 1.1).

An artifact is one image. Its layers are our layers, byte for byte, and one more on top with what commits them:
manifests and signatures, laid out as in a store. So an image can be read in two ways, and both verify like any store:
blob by blob (`images.ImageStore`), and as a directory that a runtime has unpacked and mounted
(`unpacked.UnpackedStore`).
"""
