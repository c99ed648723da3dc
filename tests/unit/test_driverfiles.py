"""Driver files by version, in the library directories of several distributions and in a real driver's packages."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from gpushare.core.errors import DeviceError
from gpushare.core.model import Inventory, LdEntry, Request, Selection, Share
from gpushare.gpu import driverfiles, driverroot, drivertable
from gpushare.request.dialects import CAPABILITIES
from gpushare.system import elf, ldcache

from tests.support.driverhost import add_mig, elf32, elf_header
from tests.unit import pure
from tools.nvidia_userland import Userland

V = "535.261.03"
BOTH = ("compute", "utility")


def tree(root: Path, *paths: str) -> str:
    """Files that begin like libraries of this machine; `a -> b` makes a link."""
    for path in paths:
        name, arrow, text = path.partition(" -> ")
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if arrow:
            target.symlink_to(text)
        else:
            target.write_bytes(elf_header())
    return str(root)


def driver(directory: str, version: str = V) -> tuple[str, ...]:
    stems = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-gpucomp")
    return (
        *(f"{directory}/{stem}.so.{version}" for stem in stems),
        f"{directory}/libcuda.so.1 -> libcuda.so.{version}",
    )


@pytest.mark.parametrize(
    "directory",
    [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/x86_64-linux-gnu/nvidia/current",
        "usr/lib64",
        "usr/lib",
        "usr/local/nvidia/lib64",
        "run/opengl-driver/lib",
    ],
)
def test_driver_is_found_in_known_directories(tmp_path: Path, directory: str) -> None:
    root = tree(tmp_path, *driver(directory))
    found = driverfiles.find(root, V, BOTH)
    assert found.cuda.source == f"{root}/{directory}/libcuda.so.{V}"
    assert found.nvml.source == f"{root}/{directory}/libnvidia-ml.so.{V}"
    assert driverfiles.nvml_library(root, V) == found.nvml.source
    assert [library.stem for library in found.libraries] == [
        "libnvidia-gpucomp",
        "libnvidia-ptxjitcompiler",
        "libnvidia-nvvm",
    ]


@pytest.mark.parametrize(
    ("libraries", "programs"),
    [
        ("home/kubernetes/bin/nvidia/lib64", "home/kubernetes/bin/nvidia/bin"),  # Container-Optimized OS on GKE
        ("var/lib/nvidia/lib64", "var/lib/nvidia/bin"),  # Container-Optimized OS
        (f"opt/nvidia/{V}/usr/lib64", f"opt/nvidia/{V}/usr/bin"),  # Flatcar
        ("opt/nvidia/current/usr/lib64", "opt/nvidia/current/usr/bin"),
        ("usr/local/glibc/usr/lib", "usr/local/bin"),  # Talos
        ("usr/lib/nvidia/tesla", "usr/libexec/nvidia/tesla/bin"),  # Bottlerocket
    ],
)
def test_driver_of_systems_with_another_place_is_found(tmp_path: Path, libraries: str, programs: str) -> None:
    """shared/cases/engines/06. A place is used only if no usual directory has libcuda of the loaded version."""
    root = tree(tmp_path, *driver(libraries), f"{programs}/nvidia-smi", "usr/sbin/nvidia-smi")
    tree(tmp_path, *driver("usr/lib64", "470.1"))
    found = driverfiles.find(root, V, BOTH)
    assert found.cuda.source == f"{root}/{libraries}/libcuda.so.{V}"
    assert found.programs == (("nvidia-smi", f"{root}/{programs}/nvidia-smi"),)
    inventory = Inventory(root, V, ())
    assert driverfiles.nvml_library(root, V) == found.nvml.source
    assert driverfiles.cuda_library(root, V) == found.cuda.source
    (tmp_path / programs / "nvidia-smi").chmod(0o755)
    assert driverfiles.host_program(inventory, "nvidia-smi") == found.programs[0][1]
    tree(tmp_path, *driver("usr/lib64")[:-1])
    assert driverfiles.find(root, V, BOTH).cuda.source == f"{root}/usr/lib64/libcuda.so.{V}"


def test_driver_is_found_through_the_loaders_cache(tmp_path: Path) -> None:
    """In a directory that only /etc/ld.so.conf of this root names."""
    root = tree(tmp_path, *driver("opt/vendor/lib"))
    with pytest.raises(DeviceError, match=f"no libcuda.so.{V} below"):
        driverfiles.find(root, V, BOTH)
    entries = [LdEntry("libcuda.so.1", f"/opt/{one}/lib/libcuda.so.1", 0x0303) for one in ("gone", "vendor")]
    cache = ldcache.Cache(ldcache.Entries(b""), b"", ())
    (tmp_path / "etc").mkdir()
    for entry in entries:
        (tmp_path / "etc/ld.so.cache").write_bytes(ldcache.render(ldcache.extended(cache, [entry])))
        if "vendor" in entry.path:
            assert driverfiles.find(root, V, BOTH).cuda.source == f"{root}/opt/vendor/lib/libcuda.so.{V}"
    (tmp_path / "etc/ld.so.cache").write_bytes(b"damaged")
    with pytest.raises(DeviceError, match=f"no libcuda.so.{V} below"):
        driverfiles.find(root, V, BOTH)


def test_linked_directories_are_resolved_inside_the_root(tmp_path: Path) -> None:
    """shared/cases/engines/06: an absolute link in a driver root means a path of that root, also where this host has
    such a path."""
    root = tree(
        tmp_path / "root",
        *driver("srvlib"),
        "usr/lib/x86_64-linux-gnu -> /srvlib",
        "lib -> /usr/lib",
        f"firmware/{V}/gsp_tu10x.bin",
        "usr/lib/firmware/nvidia -> /firmware",
        "devices/nvidia0",
        "devices/nvidia-fs3",
        "devices/caps/nvidia-cap1",
        "devices/nvidia-caps -> /devices/caps",
        "dev -> /devices",
        "var/sockets/x",
        "run/nvidia-persistenced -> /var/sockets",
    )
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{root}/var/sockets/socket")
        found = driverfiles.find(root, V, BOTH)
    assert found.cuda.source == f"{root}/srvlib/libcuda.so.{V}"
    assert driverfiles.nvml_library(root, V) == found.nvml.source == f"{root}/srvlib/libnvidia-ml.so.{V}"
    assert found.firmware == (f"{root}/firmware/{V}/gsp_tu10x.bin",)
    assert found.sockets == (("/run/nvidia-persistenced/socket", f"{root}/var/sockets/socket"),)
    for name, path in (("nvidia0", "nvidia0"), ("nvidia-caps/nvidia-cap1", "caps/nvidia-cap1")):
        node = driverroot.node(root, name, simulated=True)
        assert node is not None and (node.name, node.source) == (name, f"{root}/devices/{path}")
    assert driverroot.numbered(root, "nvidia-fs#") == ("nvidia-fs3",)


def test_links_follow_table(tmp_path: Path) -> None:
    found = driverfiles.find(tree(tmp_path, *driver("usr/lib64")), V, BOTH)
    links = {library.stem: library.links for library in (found.cuda, *found.libraries)}
    assert links == {
        "libcuda": (("libcuda.so.1", f"libcuda.so.{V}"), ("libcuda.so", "libcuda.so.1")),
        "libnvidia-ptxjitcompiler": (("libnvidia-ptxjitcompiler.so.1", f"libnvidia-ptxjitcompiler.so.{V}"),),
        "libnvidia-nvvm": (("libnvidia-nvvm.so.4", f"libnvidia-nvvm.so.{V}"),),
        "libnvidia-gpucomp": (),
    }


def test_32_bit_libraries_are_not_taken(tmp_path: Path) -> None:
    """With the driver in lib64, usr/lib has the 32-bit set of the same version."""
    root = tree(tmp_path, *driver("usr/lib64"), f"usr/lib/libcudadebugger.so.{V}")
    found = driverfiles.find(root, V, BOTH)
    assert "/usr/lib/" not in "".join(library.source for library in (found.cuda, found.nvml, *found.libraries))


def test_linked_library_is_resolved_inside_the_root(tmp_path: Path) -> None:
    stem = "store/abc/libcuda.so"
    links = (f"usr/lib64/libcuda.so.{V} -> /{stem}.{V}", f"usr/lib64/libnvidia-ml.so.{V}")
    root = tree(tmp_path, f"{stem}.{V}", *links)
    assert driverfiles.find(root, V, ()).cuda.source == f"{root}/{stem}.{V}"


def test_capabilities_select_files(tmp_path: Path) -> None:
    root = tree(tmp_path, *driver("usr/lib64"), "usr/bin/nvidia-smi", "usr/bin/nvidia-cuda-mps-server")
    utility = driverfiles.find(root, V, ("utility",))
    assert (utility.asked_cuda, utility.asked_nvml, utility.libraries) == (False, True, ())
    assert utility.programs == (("nvidia-smi", f"{root}/usr/bin/nvidia-smi"),)
    compute = driverfiles.find(root, V, ("compute",))
    assert (compute.asked_cuda, compute.asked_nvml) == (True, False)
    assert [name for name, _ in compute.programs] == ["nvidia-cuda-mps-server"]
    assert driverfiles.find(root, V, ()).programs == ()


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        ((), rf"no libcuda.so.{V} below"),
        (driver("usr/lib64", "550.54.15"), rf"the loaded driver is {V}, the libraries below .* are 550.54.15; finish"),
        (
            (*driver("usr/lib64", "550.54.15"), *driver("usr/lib/x86_64-linux-gnu", "560.1")),
            "are 550.54.15, 560.1",
        ),
        ((f"usr/lib64/libcuda.so.{V}",), rf"no libnvidia-ml.so.{V} beside libcuda in .*/usr/lib64"),
    ],
)
def test_missing_or_other_driver_is_refused(tmp_path: Path, paths: tuple[str, ...], what: str) -> None:
    with pytest.raises(DeviceError, match=what) as caught:
        driverfiles.find(tree(tmp_path, *paths), V, BOTH)
    assert "\n" not in str(caught.value)


def test_driver_of_a_vgpu_host_is_named(tmp_path: Path) -> None:
    """NVIDIA's vGPU manager has NVML, and no CUDA."""
    root = tree(tmp_path, f"usr/lib64/libnvidia-ml.so.{V}", "sys/module/nvidia_vgpu_vfio/version")
    with pytest.raises(
        DeviceError, match="^a vGPU host is not supported: .*; install gpushare in the virtual machines"
    ):
        driverfiles.find(root, V, BOTH)


def test_files_of_another_version_are_not_mixed_in(tmp_path: Path) -> None:
    root = tree(
        tmp_path, *driver("usr/lib64", "550.54.15"), f"usr/lib64/libcuda.so.{V}", f"usr/lib64/libnvidia-ml.so.{V}"
    )
    found = driverfiles.find(root, V, BOTH)
    assert {library.name for library in (found.cuda, found.nvml)} == {f"libcuda.so.{V}", f"libnvidia-ml.so.{V}"}
    assert found.libraries == ()


def test_programs_are_found_through_debian_alternatives(tmp_path: Path) -> None:
    """Absolute links are resolved inside the root, so that a driver root never yields the host's files."""
    root = tree(
        tmp_path,
        *driver("usr/lib64"),
        "usr/bin/nvidia-smi -> /etc/alternatives/nvidia-smi",
        "etc/alternatives/nvidia-smi -> ../../opt/driver/nvidia-smi",
        "opt/driver/nvidia-smi",
        "usr/bin/nvidia-debugdump -> /etc/passwd",
        "usr/bin/nvidia-persistenced -> nvidia-persistenced",
    )
    assert driverfiles.find(root, V, ("utility",)).programs == (("nvidia-smi", f"{root}/opt/driver/nvidia-smi"),)


def test_firmware_and_sockets_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(
        tmp_path,
        *driver("usr/lib64"),
        f"lib/firmware/nvidia/{V}/gsp_tu10x.bin",
        f"lib/firmware/nvidia/{V}/other.bin",
        "lib/firmware/nvidia/550.1/gsp_tu10x.bin",
        "run/nvidia-fabricmanager/socket",
        "run/nvidia-persistenced/x",
    )
    monkeypatch.chdir(tmp_path / "run/nvidia-persistenced")  # the whole path exceeds a socket address
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        found = driverfiles.find(root, V, ("utility",))
    assert found.firmware == (f"{root}/lib/firmware/nvidia/{V}/gsp_tu10x.bin",)
    assert found.sockets == (("/run/nvidia-persistenced/socket", f"{root}/run/nvidia-persistenced/socket"),)


def test_character_devices_are_found(tmp_path: Path) -> None:
    """Character devices count; a regular file counts only where the root is simulated."""
    root = tree(tmp_path, *driver("usr/lib64"), "dev/nvidia-uvm")
    os.mknod(tmp_path / "dev/nvidiactl", 0o600 | 0o020000, os.makedev(195, 255))
    real = driverfiles.find(root, V, BOTH)
    assert real.nodes == (driverroot.HostNode("nvidiactl", f"{root}/dev/nvidiactl", 195, 255),)
    assert real.missing_nodes == ("nvidia-uvm", "nvidia-uvm-tools")
    simulated = driverfiles.find(root, V, BOTH, simulated=True)
    assert [node.name for node in simulated.nodes] == ["nvidiactl", "nvidia-uvm"]
    assert [node.name for node in driverfiles.find(root, V, ("utility",)).nodes] == ["nvidiactl"]


def test_real_driver_is_found_completely(userland: Userland) -> None:
    """Every library of the packages is found, and the links to it include its DT_SONAME."""
    found = driverfiles.find(str(userland.root), userland.version, BOTH)
    libraries = (found.cuda, found.nvml, *found.libraries)
    on_disk = {path.name for path in userland.libdir.glob(f"*.so.{userland.version}") if not path.is_symlink()}
    rows = (drivertable.CAPABILITIES[word] for word in BOTH)
    known = {f"{stem}.so.{userland.version}" for row in rows for stem in row.libraries}
    assert {library.name for library in libraries} == on_disk & known
    assert {"libnvidia-ptxjitcompiler", "libnvidia-nvvm"} <= {library.stem for library in libraries}
    for library in libraries:
        with open(library.source, "rb") as file:
            real = elf.read_library(file.fileno())
        assert real is not None
        assert real.soname in {library.name, *(name for name, _ in library.links)}, library
        assert library.links == () or real.soname == library.links[0][0], library
    assert {"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} <= {name for name, _ in found.programs}


def test_each_library_has_one_set_of_links() -> None:
    """The links of a library with two capabilities must not depend on the requested one."""
    links: dict[str, tuple[str, ...]] = {}
    for row in drivertable.CAPABILITIES.values():
        for stem, endings in row.libraries.items():
            assert links.setdefault(stem, endings) == endings
    assert set(drivertable.ALWAYS) | set(drivertable.COMPAT) <= set(links)
    assert set(drivertable.CAPABILITIES) == {"", *CAPABILITIES}


def names(found: driverfiles.DriverFiles) -> set[str]:
    return {name for library in found.libraries for name, _ in library.links} | {one.name for one in found.libraries}


def test_graphics_capability_finds_libraries_and_vendor_files(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        *driver("usr/lib64"),
        *(f"usr/lib64/{stem}.so.{V}" for stem in ("libGLX_nvidia", "libnvidia-glcore", "libnvidia-allocator")),
        "usr/lib64/libnvidia-egl-gbm.so.1.1.0",
        "usr/lib64/libnvidia-egl-gbm.so.1 -> libnvidia-egl-gbm.so.1.1.0",
        "usr/share/vulkan/icd.d/nvidia_icd.json",
        "etc/vulkan/icd.d/nvidia_icd.json -> /usr/share/vulkan/icd.d/nvidia_icd.json",
        "run/opengl-driver/share/glvnd/egl_vendor.d/10_nvidia.json",
        "usr/share/vulkan/icd.d/other.json",
    )
    found = driverfiles.find(root, V, ("graphics",))
    assert {"libGLX_nvidia.so.0", "libGLX_indirect.so.0", "gbm/nvidia-drm_gbm.so"} <= names(found)
    gbm = next(library for library in found.libraries if library.stem == "libnvidia-egl-gbm")
    assert gbm[1:4] == (
        "libnvidia-egl-gbm.so.1.1.0",
        f"{root}/usr/lib64/libnvidia-egl-gbm.so.1.1.0",
        (("libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.0"),),
    )
    assert {(one.target, one.source) for one in found.data} == {
        ("/usr/share/vulkan/icd.d/nvidia_icd.json", f"{root}/usr/share/vulkan/icd.d/nvidia_icd.json"),
        ("/etc/vulkan/icd.d/nvidia_icd.json", f"{root}/usr/share/vulkan/icd.d/nvidia_icd.json"),
        (
            "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            f"{root}/run/opengl-driver/share/glvnd/egl_vendor.d/10_nvidia.json",
        ),
    }
    assert driverfiles.find(root, V, BOTH).data == ()
    assert "gbm/nvidia-drm_gbm.so" not in names(driverfiles.find(root, V, BOTH))


def test_video_decoder_is_found_in_vdpau_directory(tmp_path: Path) -> None:
    root = tree(tmp_path, *driver("usr/lib64"), f"usr/lib64/vdpau/libvdpau_nvidia.so.{V}")
    found = driverfiles.find(root, V, ("compute", "video"))
    decoder = next(library for library in found.libraries if library.stem == "libvdpau_nvidia")
    assert decoder.links == (
        ("libvdpau_nvidia.so.1", decoder.name),
        ("vdpau/libvdpau_nvidia.so.1", f"../{decoder.name}"),
    )


def test_display_capability_finds_x_driver(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        *driver("usr/lib64"),
        "usr/lib64/xorg/modules/drivers/nvidia_drv.so",
        f"usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so.{V}",
        "usr/share/X11/xorg.conf.d/10-nvidia.conf",
    )
    found = driverfiles.find(root, V, ("display", "graphics"))
    assert sorted(one.target for one in found.data) == [
        "/usr/lib64/xorg/modules/drivers/nvidia_drv.so",
        f"/usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so.{V}",
        "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
    ]
    assert "nvidia-modeset" in found.missing_nodes


@pytest.mark.parametrize("directory", ["usr/lib/i386-linux-gnu", "usr/lib32", "usr/lib"])
def test_32_bit_libraries_are_found_by_elf_header(tmp_path: Path, directory: str) -> None:
    """Recognized by ELF header, because other distributions have 64-bit files in the same directory."""
    root = tree(tmp_path, *driver("usr/lib64"), *driver(directory))
    (tmp_path / directory / f"libcuda.so.{V}").write_bytes(elf32())
    found = driverfiles.find(root, V, (*BOTH, "compat32"))
    assert [library.source for library in found.libraries32] == [f"{root}/{directory}/libcuda.so.{V}"]
    assert found.cuda.source == f"{root}/usr/lib64/libcuda.so.{V}"
    assert driverfiles.find(root, V, BOTH).libraries32 == ()


def test_firmware_is_found_in_kernel_search_path(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        *driver("usr/lib64"),
        f"srv/firmware/nvidia/{V}/gsp_ga10x.bin",
        f"lib/firmware/nvidia/{V}/gsp_tu10x.bin",
    )
    parameter = tmp_path / "sys/module/firmware_class/parameters/path"
    parameter.parent.mkdir(parents=True)
    parameter.write_text("/srv/firmware\n")
    assert driverfiles.find(root, V, BOTH).firmware == (f"{root}/srv/firmware/nvidia/{V}/gsp_ga10x.bin",)
    parameter.write_text("\n")
    assert driverfiles.find(root, V, BOTH).firmware == (f"{root}/lib/firmware/nvidia/{V}/gsp_tu10x.bin",)


def test_request_selects_features_imex_and_mig_files(tmp_path: Path) -> None:
    """Features, IMEX and MIG come with the request. A missing file is reported, or refused if it was requested by
    name."""
    root = tree(
        tmp_path, *driver("usr/lib64"), "etc/cufile.json", "dev/nvidia-fs2", "dev/nvidia-fs10", "dev/nvidia-fsx"
    )
    add_mig(tmp_path)
    tree(tmp_path, "dev/nvidia-caps-imex-channels/channel3")
    host = Inventory(root, V, (), simulated=True)
    asked = Request("own", Selection("all"), BOTH, features=("gds", "gdrcopy"), imex_channels=("all",))
    share = Share(0, pure.device(0, parent=pure.UUIDS[0], gpu_instance=1, compute_instance=0), None)
    found = driverfiles.for_request(host, asked, (share,))
    assert [node.name for node in found.nodes] == [
        *("nvidia-fs2", "nvidia-fs10", "nvidia-caps-imex-channels/channel3"),
        *("nvidia-caps/nvidia-cap12", "nvidia-caps/nvidia-cap13"),
    ]
    assert found.missing_nodes[-1] == "gdrdrv"
    assert found.data == (driverfiles.DataFile("/etc/cufile.json", f"{root}/etc/cufile.json"),)
    assert found.proc_capabilities == ("gpu0/mig/gi1/access", "gpu0/mig/gi1/ci0/access")
    with pytest.raises(DeviceError, match="no IMEX channel /dev/nvidia-caps-imex-channels/channel4"):
        driverfiles.for_request(host, asked._replace(imex_channels=("4",)), ())
    gone = share._replace(device=share.device._replace(gpu_instance=7))
    with pytest.raises(DeviceError, match="no MIG capability gpu0/mig/gi7/access; run gpushare refresh"):
        driverfiles.for_request(host, asked, (gone,))


def test_drm_nodes_are_limited_to_granted_gpus(tmp_path: Path) -> None:
    root = tree(tmp_path, *driver("usr/lib64"))
    (tmp_path / "dev/dri").mkdir(parents=True)
    for bus, number in (("0000:01:00.0", 0), ("0000:02:00.0", 1)):
        tree(tmp_path, f"sys/bus/pci/devices/{bus}/drm/card{number}/x")
        tree(tmp_path, f"sys/bus/pci/devices/{bus}/drm/renderD{128 + number}/x")
        os.mknod(tmp_path / f"dev/dri/card{number}", 0o600 | 0o020000, os.makedev(226, number))
        os.mknod(tmp_path / f"dev/dri/renderD{128 + number}", 0o600 | 0o020000, os.makedev(226, 128 + number))
    host = Inventory(root, V, ())
    share = Share(0, pure.device(1), None)
    for capabilities, wanted in ((("graphics",), ["renderD129"]), (("display", "graphics"), ["card1", "renderD129"]),
                                 (BOTH, [])):  # fmt: skip
        found = driverfiles.for_request(host, Request("own", Selection("all"), capabilities), (share,))
        assert [node.name for node in found.nodes] == [f"dri/{name}" for name in wanted]


@pytest.mark.parametrize("absolute", [True, False])
def test_link_to_a_directory_that_only_the_host_has_is_not_followed(tmp_path: Path, absolute: bool) -> None:
    outside = tmp_path / "host"
    (outside / "lib").mkdir(parents=True)
    (outside / "lib/libcuda.so.1").touch()
    root = tmp_path / "root"
    tree(root, f"usr/lib -> {outside if absolute else '../../host'}/lib", f"dev -> {outside}/lib")
    for path in ("usr/lib", "dev"):
        found = driverroot.below(str(root), path)
        assert not os.path.exists(found) and driverroot.listing(found) == frozenset()
    assert driverroot.node(str(root), "libcuda.so.1", simulated=True) is None
    assert driverroot.numbered(str(root), "libcuda.so.#") == ()
    assert driverroot.below(str(root), "usr/missing") == f"{root}/usr/missing"
