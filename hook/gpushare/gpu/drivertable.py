"""Table of the files of NVIDIA's driver for each capability and feature.

A row's libraries are matched as `<stem>.so.<driver version>`; the endings are the names that a loader requests.
Names are of driver branches 470 to 590; a file that a branch lacks is left out. Pure (start path).
"""

from typing import NamedTuple

Links = tuple[str, ...]


class Row(NamedTuple):
    """The files and nodes of one capability."""

    libraries: dict[str, Links] = {}  # stem -> endings of its links, each leading to the previous name
    plugins: tuple[str, ...] = ()  # libraries with their own version number, by the name that a loader requests
    programs: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()  # below the driver root, at the same path in the container
    nodes: tuple[str, ...] = ()  # below /dev
    data: tuple[str, ...] = ()  # below one of DATA_DIRS; {version} is the driver's


CAPABILITIES: dict[str, Row] = {
    "": Row(nodes=("nvidiactl",)),  # with every GPU
    "utility": Row(
        libraries={
            "libnvidia-ml": ("so.1", "so"),
            "libnvidia-cfg": ("so.1",),
            "libnvidia-nscq": ("so.2",),
            "libnvidia-sandboxutils": ("so.1",),
        },
        programs=("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager"),
        sockets=("run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket"),
    ),
    "compute": Row(
        libraries={
            "libcuda": ("so.1", "so"),
            "libcudadebugger": ("so.1",),
            "libnvidia-opencl": ("so.1",),
            "libnvidia-gpucomp": (),
            "libnvidia-ptxjitcompiler": ("so.1",),
            "libnvidia-fatbinaryloader": (),
            "libnvidia-allocator": ("so.1",),
            "libnvidia-compiler": (),
            "libnvidia-pkcs11": (),
            "libnvidia-pkcs11-openssl3": (),
            "libnvidia-nvvm": ("so.4",),
            "libnvidia-tileiras": (),
        },
        programs=("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
        nodes=("nvidia-uvm", "nvidia-uvm-tools"),
        data=("OpenCL/vendors/nvidia.icd",),
    ),
    "video": Row(
        libraries={
            "libvdpau_nvidia": ("so.1",),
            "libnvidia-encode": ("so.1",),
            "libnvidia-opticalflow": ("so.1", "so"),
            "libnvcuvid": ("so.1",),
        },
    ),
    "graphics": Row(
        libraries={
            "libnvidia-eglcore": (),
            "libnvidia-glcore": (),
            "libnvidia-tls": (),
            "libnvidia-glsi": (),
            "libnvidia-fbc": ("so.1",),
            "libnvidia-ifr": ("so.1",),
            "libnvidia-rtcore": (),
            "libnvoptix": ("so.1",),
            "libGLX_nvidia": ("so.0",),
            "libEGL_nvidia": ("so.0",),
            "libGLESv2_nvidia": ("so.2",),
            "libGLESv1_CM_nvidia": ("so.1",),
            "libnvidia-glvkspirv": (),
            "libnvidia-cbl": (),
            "libnvidia-gpucomp": (),  # of compute as well: the shader compiler, since 545
            "libnvidia-allocator": ("so.1",),  # of compute as well: buffers for GBM
            "libnvidia-vulkan-producer": (),
            "libnvidia-vksc-core": ("so.1",),
            "libnvidia-api": ("so.1",),
            "libnvidia-present": (),
        },
        plugins=(
            "libnvidia-egl-gbm.so.1",
            "libnvidia-egl-wayland.so.1",
            "libnvidia-egl-xcb.so.1",
            "libnvidia-egl-xlib.so.1",
        ),
        data=(
            "glvnd/egl_vendor.d/10_nvidia.json",
            "vulkan/icd.d/nvidia_icd.json",
            "vulkan/icd.d/nvidia_icd.x86_64.json",
            "vulkan/icd.d/nvidia_layers.json",
            "vulkan/implicit_layer.d/nvidia_layers.json",
            "vulkansc/icd.d/nvidia_icd_vksc.json",
            "egl/egl_external_platform.d/10_nvidia_wayland.json",
            "egl/egl_external_platform.d/15_nvidia_gbm.json",
            "egl/egl_external_platform.d/20_nvidia_xcb.json",
            "egl/egl_external_platform.d/20_nvidia_xlib.json",
            "nvidia/nvoptix.bin",
        ),
    ),
    "display": Row(
        nodes=("nvidia-modeset",),
        data=(
            "X11/xorg.conf.d/10-nvidia.conf",
            "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
            "xorg/modules/drivers/nvidia_drv.so",
            "xorg/modules/extensions/libglxserver_nvidia.so.{version}",
        ),
    ),
    "ngx": Row(libraries={"libnvidia-ngx": ("so.1",)}),
    "compat32": Row(),  # the 32-bit libraries of the other capabilities
}

# capability -> stem -> extra links: (name, link text), below the library directory
EXTRA_LINKS: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "graphics": {
        "libGLX_nvidia": (("libGLX_indirect.so.0", "{name}"),),
        "libnvidia-allocator": (("gbm/nvidia-drm_gbm.so", "../{name}"),),
    },
    "video": {"libvdpau_nvidia": (("vdpau/libvdpau_nvidia.so.1", "../{name}"),)},
}


class Feature(NamedTuple):
    """Devices and files that a container gets only when a variable has the value `enabled`."""

    variable: str
    nodes: tuple[str, ...]  # below /dev; # stands for a number
    data: tuple[tuple[str, str], ...] = ()  # (path below the driver root, "file" or "dir")


FEATURES: dict[str, Feature] = {
    "gds": Feature("NVIDIA_GDS", ("nvidia-fs#",), (("run/udev", "dir"), ("etc/cufile.json", "file"))),
    "mofed": Feature("NVIDIA_MOFED", ("infiniband/uverbs#", "infiniband/rdma_cm")),
    "gdrcopy": Feature("NVIDIA_GDRCOPY", ("gdrdrv",)),
    "nvswitch": Feature("NVIDIA_NVSWITCH", ("nvidia-nvswitchctl", "nvidia-nvswitch#")),
}

ALWAYS = ("libcuda", "libnvidia-ml")  # the shim needs both for every request
# libcuda, the libraries that it loads, and the debugger that inspects it: they must have the same version
COMPAT = ("libcuda", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libcudadebugger")
CAPS_DIR = "nvidia-caps"
IMEX_DIR = "nvidia-caps-imex-channels"

# Directories of 64-bit libraries by distribution: multiarch (Debian and its alternatives), lib64, NixOS, and the folder
# of NVIDIA's images
LIBRARY_DIRS = (
    "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib64", "usr/lib64/nvidia", "lib/x86_64-linux-gnu", "lib64",
    "run/opengl-driver/lib", "usr/local/nvidia/lib64",
)  # fmt: skip
LAST_LIBRARY_DIR = "usr/lib"  # of 64-bit libraries on Arch, of 32-bit ones on Fedora
OTHER_MACHINES = {
    "x86_64": ("usr/lib/aarch64-linux-gnu",),
    "aarch64": ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"),
}
LIBRARY_DIRS_32 = (
    "usr/lib/i386-linux-gnu", "usr/lib/i386-linux-gnu/nvidia/current",
    "usr/lib32", "run/opengl-driver-32/lib", "usr/local/nvidia/lib", "usr/lib",
)  # fmt: skip


class Place(NamedTuple):
    """Where a system that keeps the driver outside its own directories has it. {version}: the driver's, {machine}: as
    uname(2) names it."""

    libraries: str
    programs: str


# In the order of search, after the directories above. Sources: Google's documents of GPUs on GKE and on
# Container-Optimized OS; Flatcar's service nvidia.service, whose layout Amazon Linux shares; Talos' extension nvidia;
# Bottlerocket's packages kmod-*-nvidia (with and without the version).
_BOTTLEROCKET = "{machine}-bottlerocket-linux-gnu/sys-root/usr"
PLACES = (
    Place("home/kubernetes/bin/nvidia/lib64", "home/kubernetes/bin/nvidia/bin"),
    Place("var/lib/nvidia/lib64", "var/lib/nvidia/bin"),
    Place("opt/nvidia/{version}/usr/lib64", "opt/nvidia/{version}/usr/bin"),
    Place("opt/nvidia/current/usr/lib64", "opt/nvidia/current/usr/bin"),
    Place("usr/local/glibc/usr/lib", "usr/local/bin"),
    Place("usr/lib/nvidia/tesla", "usr/libexec/nvidia/tesla/bin"),
    Place(f"{_BOTTLEROCKET}/lib/nvidia/tesla", f"{_BOTTLEROCKET}/libexec/nvidia/tesla/bin"),
    Place(f"{_BOTTLEROCKET}/lib/nvidia/tesla/{{version}}", f"{_BOTTLEROCKET}/libexec/nvidia/tesla/bin/{{version}}"),
)
# Below a driver root without libraries: the root file system of the container that NVIDIA's GPU Operator starts
CONTAINER_ROOT = "run/nvidia/driver"
SUBDIRECTORIES = ("vdpau",)  # of a library directory; some libraries can be there instead
PROGRAM_DIRS = ("usr/lib/nvidia/current", "usr/bin", "usr/sbin", "usr/local/nvidia/bin", "run/opengl-driver/bin")
FIRMWARE_DIRS = ("lib/firmware/nvidia", "usr/lib/firmware/nvidia", "run/current-system/firmware/nvidia")
# (directory on the host, directory in the container); "" is the same path
DATA_DIRS = (
    ("etc", ""), ("usr/share", ""), ("usr/lib", ""), ("usr/lib64", ""), ("run/opengl-driver/share", "usr/share"),
)  # fmt: skip
