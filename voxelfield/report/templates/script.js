const dialog = document.querySelector("dialog"), large = dialog.querySelector(".compare");
const at = (box, value) => box.style.setProperty("--at", value);
document.addEventListener("input", ({ target }) => at(target.parentElement, target.value));
document.addEventListener("click", ({ target }) => {
  const button = target.closest(".enlarge");
  if (button) {
    const { kind } = button.dataset, slider = large.querySelector("input");
    const pictures = ["truth", kind].map(each => button.closest(".view").querySelector(`img[data-kind=${each}]`).cloneNode());
    large.replaceChildren(...pictures, slider);
    large.dataset.kind = kind;
    large.style.setProperty("--aspect", pictures[0].naturalWidth / pictures[0].naturalHeight);
    at(large, slider.value = button.dataset.at);
    dialog.showModal();
    slider.focus();
  } else if (target === dialog || target.closest(".close")) dialog.close();
});
if (matchMedia("(prefers-reduced-motion: reduce)").matches) document.querySelector("video")?.pause();
