// Elements as plain data, and a container brought to show them with as few changes as possible: what did not change
// keeps its focus, its selection and its scroll position.

const SVG = "http://www.w3.org/2000/svg";

/** Describe an element. `props` are attributes; `vars` are custom CSS properties; false and null leave one out. */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: children.flat(Infinity).filter((c) => c !== null && c !== false) };
}

/** Make `container` show exactly `nodes`. */
export function render(container, ...nodes) {
  patchChildren(container, nodes.flat(Infinity).filter((n) => n !== null && n !== false));
}

function patchChildren(parent, nodes) {
  nodes.forEach((node, at) => {
    const old = parent.childNodes[at];
    if (typeof node !== "object") {
      const text = String(node);
      if (old?.nodeType === Node.TEXT_NODE) {
        if (old.data !== text) old.data = text;
      } else {
        replace(parent, old, document.createTextNode(text));
      }
      return;
    }
    let element = old;
    if (old?.nodeName.toLowerCase() !== node.tag.toLowerCase()) {
      element = inSvg(parent, node.tag) ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
      replace(parent, old, element);
    }
    patchProps(element, node.props);
    patchChildren(element, node.children);
  });
  while (parent.childNodes.length > nodes.length) parent.lastChild.remove();
}

function replace(parent, old, fresh) {
  if (old) old.replaceWith(fresh);
  else parent.append(fresh);
}

function inSvg(parent, tag) {
  return tag === "svg" || parent.namespaceURI === SVG;
}

function patchProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "vars") {
      for (const [property, amount] of Object.entries(value)) element.style.setProperty(property, amount);
    } else if (value === false || value === null || value === undefined) {
      element.removeAttribute(name);
    } else if (element.getAttribute(name) !== String(value)) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  for (const { name } of [...element.attributes]) {
    // Whether a <details> is open is the reader's affair.
    if (!(name in props) && name !== "style" && name !== "open") element.removeAttribute(name);
  }
}
